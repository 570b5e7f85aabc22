"""Other people's model files: read into run directories, and written from them."""
