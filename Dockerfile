# Braid on NVIDIA's PyTorch image, which brings torch, NCCL and Transformer Engine built for each other.
#   docker build -t braid .
FROM nvcr.io/nvidia/pytorch:25.09-py3

WORKDIR /opt/braid
COPY . .

# The constraint keeps the image's own torch, in place of the image's longer list, whose pins may be too old for the build.
RUN python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > /opt/constraints.txt \
    && PIP_CONSTRAINT=/opt/constraints.txt pip install --no-cache-dir '.[examples,plots,tensorboard,tokenizers]'
