"""One start of a run's ranks: its files, what guards watch, how ranks ended, and why."""
