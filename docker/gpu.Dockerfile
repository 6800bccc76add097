# A host with GPUs: SGLang's own image, with the other two environments and the pipeline beside it.
# The image's packages stay as they are; each of our environments is a virtual one on the image's Python.
FROM lmsysorg/sglang:v0.5.23
# Debian and Ubuntu keep one version of a package, so there is nothing to pin.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install --no-install-recommends --yes \
    "$(python3 -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" \
  && rm -rf /var/lib/apt/lists/* \
  && useradd --uid 50000 --gid 0 --home-dir /var/lib/aerie/home aerie \
  && install --directory --owner aerie --group 0 /var/lib/aerie /var/lib/aerie/home
WORKDIR /build
COPY include/aerie/local/environments.py include/aerie/local/environments.py
COPY requirements/tools.txt requirements/airflow.txt requirements/
RUN AERIE_HOME=/opt/aerie PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 python3 include/aerie/local/environments.py airflow \
  || { cat /opt/aerie/logs/setup.log; exit 1; }
COPY requirements/model.txt requirements/model-no-deps.txt requirements/
RUN AERIE_HOME=/opt/aerie PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 python3 include/aerie/local/environments.py model \
  || { cat /opt/aerie/logs/setup.log; exit 1; }
# The serve stages run where SGLang is; of what they import, this adds only what the image lacks.
COPY requirements/common.in requirements/
RUN python3 -m venv --system-site-packages /opt/aerie/envs/serve \
  && /opt/aerie/envs/serve/bin/python -m pip install --no-cache-dir -r requirements/common.in
COPY include /opt/aerie/include
COPY plugins /opt/aerie/plugins
COPY dags /opt/aerie/dags
COPY demo /opt/aerie/demo
COPY docker/entrypoint docker/initialise /usr/local/bin/
ENV AERIE_HOME=/var/lib/aerie \
  AERIE_AIRFLOW_PYTHON=/opt/aerie/envs/airflow/bin/python \
  AERIE_MODEL_PYTHON=/opt/aerie/envs/model/bin/python \
  AERIE_SERVE_PYTHON=/opt/aerie/envs/serve/bin/python \
  AIRFLOW_HOME=/var/lib/aerie/airflow \
  PATH=/opt/aerie/envs/airflow/bin:$PATH \
  PYTHONPATH=/opt/aerie/include:/opt/aerie/plugins \
  PYTHONDONTWRITEBYTECODE=1 \
  PYTHONUNBUFFERED=1
WORKDIR /var/lib/aerie
USER 50000
ENTRYPOINT ["/usr/local/bin/entrypoint"]
CMD ["airflow", "scheduler"]
