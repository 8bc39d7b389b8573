"""What a run costs on given chips."""
