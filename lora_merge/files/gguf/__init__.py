"""GGUF: the container of llama.cpp and ComfyUI-GGUF, its types, and the models in it."""
