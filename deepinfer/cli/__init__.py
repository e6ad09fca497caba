"""The command line, `deepinfer ...`. Every command has `--json`; errors are one line on standard error."""
