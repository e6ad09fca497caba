"""Kernels and backends that are wrong on purpose, one family a file: the suite must kill every one of them."""
