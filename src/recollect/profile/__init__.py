"""What a training step computes and needs: the record of it, and the measured peak."""
