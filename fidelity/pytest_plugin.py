def pytest_configure(config): pass
