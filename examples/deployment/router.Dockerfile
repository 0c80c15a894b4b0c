# The router's image: docker build -f examples/deployment/router.Dockerfile -t sglang-router .
FROM python:3.12-slim
RUN pip install --no-cache-dir sglang-router==0.3.2
RUN useradd --create-home router
USER router
EXPOSE 30000 29000
ENTRYPOINT ["python", "-m", "sglang_router.launch_router", "--host", "0.0.0.0", "--prometheus-host", "0.0.0.0"]
