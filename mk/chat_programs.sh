#!/usr/bin/env bash
# chat_programs.sh: programs that speak OpenAI's protocol, with which the gateway is tried: LiteLLM and langchain-openai in
# environments of their own, since they need other versions; Vercel's AI SDK in .build/chat-programs. What is there costs nothing.
source "$(dirname "$0")/lib.sh"

apart litellm 'litellm[proxy]==1.106.2'
apart chat-programs openai==3.54.0 langchain-openai==1.7.3
node=$ROOT/.build/chat-programs
wanted=(ai@6.0.326 @ai-sdk/openai@3.0.141 @ai-sdk/openai-compatible@2.0.92 openai@6.49.0 zod@4.6.7)
[ "$(cat "$node/wanted" 2>/dev/null)" != "${wanted[*]}" ] || exit 0
mkdir -p "$node"
npm install --prefix "$node" --no-audit --no-fund --ignore-scripts "${wanted[@]}"
echo "${wanted[*]}" >"$node/wanted"
