"""Pictures of masks, layouts and schedules: their numbers, and how they are drawn."""
