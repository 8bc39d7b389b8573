"""The command line. Modules here import JAX only once parsing has succeeded."""
