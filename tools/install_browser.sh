#!/usr/bin/env bash
# Finds or installs a Chromium. Never fails: the checks of the built pages skip, and say so, where there is none.
set -u
for name in chromium chromium-browser google-chrome; do
  if path=$(command -v "$name"); then
    echo "Browser: $path"
    exit 0
  fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium > /dev/null
fi
command -v chromium || echo "No browser. Install Chromium or Chrome to have the built pages checked: apt-get install chromium"
