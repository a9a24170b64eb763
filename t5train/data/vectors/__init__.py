"""Embeddings of passages and FAISS indexes of them: checks of a downloaded index, and near-duplicates through one.

faiss is imported only when something here is called; neither tokenising nor training needs it. FAISS proposes similar
passages, and an exact similarity of their texts decides.

Not here: which indexes are known (``t5train.spec.known_texts``), and duplicates that are found without embeddings.
"""
