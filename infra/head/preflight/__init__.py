"""What is asked of every host before a launch, so that whatever is wrong is named before anything waits for it.

Each node gathers its facts itself (``gather``, ``network``, ``software``, ``devices``, ``room``); pure functions on
the head judge the facts of all of them (``addresses``, ``judgements``); a small all-reduce over all ranks comes last.
"""
