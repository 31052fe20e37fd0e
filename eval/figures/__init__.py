"""From runs to figures."""
