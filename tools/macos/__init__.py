"""`make macos`: compiles and links the extension for macOS arm64 on Linux, and checks what came out.

Nothing of Apple's SDK is used. The compiler and the C headers come from the package ziglang, PyTorch's headers and
libraries from its macOS wheels, the names of Metal's methods from metal-cpp in the package mlx-metal.
"""
