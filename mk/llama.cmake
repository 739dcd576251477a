# Read by CMake inside llama.cpp's project. Of all it has, llama-cpp-python loads the library llama with ggml below it;
# llama-common would be compiled only because its installation asks for it, and takes longer than the rest.
set(LLAMA_BUILD_COMMON OFF)
