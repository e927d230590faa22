"""The node pack for ComfyUI: files in and files out, through the public Python API."""
