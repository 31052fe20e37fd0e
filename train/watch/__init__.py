"""What is watched while a drafter trains: held-out losses, tau, speed."""
