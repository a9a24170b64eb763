"""Use of a trained T5: generation and evaluation, for exports of this project and Hugging Face folders of any other T5.

Not here: losses during training (``t5train.train.validation``), and proof that an export is the trained model
(``t5train.release.certification``).
"""
