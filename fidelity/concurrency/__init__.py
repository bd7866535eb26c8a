"""Decodes at once: measured together against n times one, and what an admission rule must reserve."""
