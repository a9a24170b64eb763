"""Use of a trained T5: predictions and their scores, an evaluation of exports, generation, losses on text, a server.

Not here: losses during training (``t5train.train.validation``), and proof that an export is the trained model
(``t5train.release.certification``).
"""
