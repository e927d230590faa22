"""What tests are made with: files, adapters, models, the command line, oracles, hostile inputs. No test."""
