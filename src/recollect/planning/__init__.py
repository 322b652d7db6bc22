"""Profile and budget in, plan out; nothing here imports torch."""
