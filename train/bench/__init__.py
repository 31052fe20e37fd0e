"""The training step beside a plain one."""
