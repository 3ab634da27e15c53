"""Builds the CPU kernel. Everything else about the package is in pyproject.toml.

One source is compiled for each instruction set and the choice is made at run time, so a wheel built anywhere
runs everywhere. The extension uses torch's stable ABI and Python's limited API: it does not tie the wheel to one
version of either. It is optional: without a compiler the package installs and runs on its reference path, and its wheel
is tagged as pure Python, so that it is never taken for one with the kernel.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path("src/lotformer/ops/cpu")
X86 = platform.machine().lower() in {"x86_64", "amd64"}
FLAGS = {
    "isa_avx2.cpp": ["-mavx2", "-mfma"],
    "isa_avx512.cpp": ["-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mfma", "-mprefer-vector-width=512"],
}


class BuildKernel(build_ext):
    """Compiles each file with the flags of its instruction set."""

    def build_extension(self, ext: Extension) -> None:
        import torch
        from torch.utils.cpp_extension import include_paths

        library = str(Path(torch.__file__).parent / "lib")
        common = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-Wno-psabi"]
        common += os.environ.get("LOTFORMER_CXXFLAGS", "").split()
        macros: list[tuple[str, str | None]] = [("TORCH_TARGET_VERSION", "0x020a000000000000")]
        if X86:
            macros.append(("LOT_X86", None))
        objects = []
        for source in ext.sources:
            objects += self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                macros=macros,
                include_dirs=[*include_paths(), *self.compiler.include_dirs],
                extra_postargs=[*common, *FLAGS.get(Path(source).name, [])],
                depends=ext.depends,
            )
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            libraries=["torch_cpu"],
            library_dirs=[library],
            extra_postargs=os.environ.get("LOTFORMER_LDFLAGS", "").split(),
            target_lang="c++",
        )


class Wheel(bdist_wheel):
    """Tags the wheel by what is in it."""

    def get_tag(self) -> tuple[str, str, str]:
        content = Path(self.bdist_dir)
        if content.is_dir():  # not so for an editable install, which has nothing to tell apart
            self.root_is_pure = not any(content.rglob("_kernel.*so"))
        return super().get_tag()


sources = ["op.cpp", "found.cpp", "joining.cpp", "masses.cpp", "near.cpp", "pooling.cpp", "scratch.cpp"]
sources += ["isa_portable.cpp"]
sources += FLAGS if X86 else []
extension = Extension(
    "lotformer.ops.cpu._kernel",
    [str(HERE / source) for source in sources],
    depends=[str(header) for header in HERE.glob("*.h")],
    py_limited_api=True,
    optional=True,
)
posix = sys.platform in {"linux", "darwin"}
setup(
    ext_modules=[extension] if posix else [],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": Wheel},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
