"""Images with labels, from whatever timm can read: folders, tar files, Hugging Face, web-datasets, torchvision."""
