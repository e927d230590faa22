"""Cancel, as ComfyUI has it."""

state = {"interrupted": False}


class InterruptProcessingException(Exception):  # ComfyUI's name
    """The user has cancelled the queue."""


def processing_interrupted() -> bool:
    return state["interrupted"]


def throw_exception_if_processing_interrupted() -> None:
    if state["interrupted"]:
        state["interrupted"] = False
        raise InterruptProcessingException
