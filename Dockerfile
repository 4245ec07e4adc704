# Braid on NVIDIA's PyTorch image, which brings torch, NCCL and Transformer Engine built for each other.
#   docker build -t braid .
FROM nvcr.io/nvidia/pytorch:25.09-py3

WORKDIR /opt/braid
COPY . .

# Editable, so that the C++ kernels lie beside the Python files that run: whoever starts /opt/braid/pretrain_mllm.py gets this
# folder first on Python's path, and a second copy among the installed packages would not be found.
# The constraints keep the image's own torch, in place of the image's longer list, whose pins may be too old for the build, and take
# the megatron-core that Braid's tests ran with under this image's Python. Triton and torchvision are the image's own.
RUN python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > /opt/constraints.txt \
    && echo 'megatron-core==0.19.2' >> /opt/constraints.txt \
    && PIP_CONSTRAINT=/opt/constraints.txt pip install --no-cache-dir --editable \
        '.[audio,diffusion,examples,hf,mlflow,plots,producers,remote,tensorboard,tokenizers,video,wandb]' \
    && python -c 'from multimodal.kernels import kernels; assert kernels is not None, "the C++ kernels did not build"'
