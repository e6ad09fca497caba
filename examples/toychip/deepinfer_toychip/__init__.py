"""The port: a backend of deepinfer for the toy chip."""
