import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))
from build_native import build  # noqa: E402


class BuildWithNative(build_py):
    """Copies the packages, then compiles their libraries beside them."""

    def run(self):
        super().run()
        build(Path(self.build_lib))


class BinaryDistribution(Distribution):
    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": BuildWithNative}, distclass=BinaryDistribution)
