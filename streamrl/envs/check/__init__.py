"""What ``streamrl env check`` looks at: tasks, episodes, rewards, and what would go wrong in training."""
