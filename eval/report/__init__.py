"""Figures as JSON, as a page, as a picture, on the screen."""
