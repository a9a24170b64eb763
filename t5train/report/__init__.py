"""What people read about a run: its data, plot of training, proof, publication, failure and summary.

Each report is Markdown or a PNG that follows from records and metrics. Not here: showing them in Prefect (``tasks``).
"""
