"""What happens when the kernel cannot be built; the package's facts are in pyproject.toml."""

import sys

from scikit_build_core.setuptools.build_cmake import BuildCMake
from setuptools import setup


class KernelIfPossible(BuildCMake):
    """Build the CPU attention kernel; without a working compiler install the package without it."""

    def run(self):
        """Build, or say that there will be no kernel."""
        try:
            super().run()
        except (Exception, SystemExit) as error:
            print(
                f"kvcellar: the CPU attention kernel was not built ({error}); the package works "
                f"without it, slower. It needs a C++17 compiler.",
                file=sys.stderr,
            )


setup(cmdclass={"build_cmake": KernelIfPossible})
