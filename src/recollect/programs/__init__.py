"""What a traced unit does under a plan: what it saves, what runs again and when, and the bytes that this takes."""
