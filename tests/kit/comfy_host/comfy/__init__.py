"""A host for the node pack: the part of ComfyUI's Python API that the pack uses, without ComfyUI."""
