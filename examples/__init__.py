"""Recipes to try the search with, on public data sets and on generated data. The plug-in never imports from here."""
