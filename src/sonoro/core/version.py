"""The version, said once: the metadata of the package is built from it, and a source tree without any knows it too."""

VERSION = "0.1.0"
