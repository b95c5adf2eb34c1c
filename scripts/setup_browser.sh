#!/usr/bin/env bash
# Installs Chromium, in which tests open the report and the documentation site. Debian, as root. What is there already is kept.
# Usage: scripts/setup_browser.sh
set -euo pipefail
if ! command -v chromium chromium-browser google-chrome >/dev/null; then
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || {
    echo "install chromium first (Debian: apt-get install chromium)" >&2
    exit 1
  }
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
fi
echo "ready: $(command -v chromium chromium-browser google-chrome | head -n 1)"
