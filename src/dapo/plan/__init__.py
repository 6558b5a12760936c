"""What a run would take on given GPUs: memory, time, disk and money, from shapes, a recipe and measured rates."""
