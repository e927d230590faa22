"""Model folders, as ComfyUI has them."""

import os

roots: dict[str, list[str]] = {"checkpoints": [], "diffusion_models": [], "text_encoders": [], "loras": []}


temp: list[str] = []


def get_temp_directory() -> str:
    return temp[0]


def get_folder_paths(kind: str) -> list[str]:
    return roots[kind][:]


def recursive_search(directory: str, excluded_dir_names: list[str] | None = None) -> tuple[list[str], dict[str, float]]:
    names = []
    for folder, folders, files in os.walk(directory, followlinks=True):
        folders[:] = [name for name in folders if name not in (excluded_dir_names or ())]
        names += [os.path.relpath(f"{folder}/{name}", directory) for name in files]
    return names, {}
