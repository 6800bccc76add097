# SGLang's own image with Aerie's keeper and the hooks that run inside the server. Nothing of the image is replaced:
# the one library that the keeper needs and the image lacks lies in a folder of its own.
FROM python:3.11.15-slim-bookworm AS libraries
COPY requirements/serve.txt /build/
RUN sed --quiet '/^tenacity==/,/[^\\]$/p' /build/serve.txt > /build/keeper.txt \
  && python -m pip install --no-cache-dir --require-hashes --no-deps --target /opt/aerie/keeper --requirement /build/keeper.txt

FROM lmsysorg/sglang:v0.5.23
# The same user as in the other images: they share files.
RUN install --directory --owner 50000 --group 0 /var/lib/aerie /var/lib/aerie/home \
  && useradd --uid 50000 --gid 0 --home-dir /var/lib/aerie/home aerie
COPY --from=libraries /opt/aerie/keeper /opt/aerie/keeper
COPY include /opt/aerie/include
ENV HOME=/var/lib/aerie/home \
  PYTHONPATH=/opt/aerie/include:/opt/aerie/keeper \
  PYTHONDONTWRITEBYTECODE=1 \
  PYTHONUNBUFFERED=1
WORKDIR /var/lib/aerie
USER 50000
ENTRYPOINT ["python3", "-m", "aerie.serving.keeper"]
CMD ["--root", "/var/lib/aerie/server", "--host", "0.0.0.0"]
