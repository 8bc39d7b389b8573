"""Operations that are neither a kernel nor a model."""
