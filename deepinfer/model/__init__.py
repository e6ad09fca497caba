"""The network: `reference` is its executable specification, the other modules the same network over caches and HAL ops."""
