"""The hardware abstraction layer: op cards, reference ops, backends, dispatch. Needs torch and numpy alone."""

HAL_VERSION = (1, 0)
