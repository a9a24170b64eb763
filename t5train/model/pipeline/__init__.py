"""T5 as a pipeline: how its layers are divided into stages, and the module that holds a stage.

Not here: the engine that runs stages (``t5train.engine.pipeline_engine``).
"""
