# An image with exp, from the wheels of `make wheelhouse`; without a network at build time.
# For cards, give the vendor's image, whose torch and plug-in stay as they are: docker build --build-arg BASE=<image> .
ARG BASE=python:3.11-slim
FROM ${BASE}
COPY build/wheelhouse /wheelhouse
RUN python3 -m pip install --no-cache-dir --no-index --find-links /wheelhouse exp-accelerators && rm -rf /wheelhouse
WORKDIR /work
ENTRYPOINT ["python3", "-m", "exp"]
