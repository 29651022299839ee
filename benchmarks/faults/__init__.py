"""What happens to a store of real processes when one of them is killed or stands still."""
