"""What several programs need."""
