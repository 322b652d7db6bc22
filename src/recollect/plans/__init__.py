"""What happens to each value of each unit: plans as data, as text, and the names in them."""
