"""What a traced unit does under a plan: the values it saves, the ops it reruns and when, and the bytes this takes."""
