"""What lies on disk. Each format is read and written in exactly one module of this package."""
