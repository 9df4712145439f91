{{- /* The pods of a pool. Arguments: root; name, values (`pool`) and `full` name of the pool; `host`,
of a worker over several hosts its number, else 0. */ -}}
{{- define "tasuki.workerTemplate" -}}
{{- $root := .root -}}
{{- $name := .name -}}
{{- $pool := .pool -}}
{{- $divided := gt (int $pool.hosts) 1 -}}
{{- $image := mergeOverwrite (deepCopy $root.Values.images.worker) ($pool.image | default dict) -}}
metadata:
  labels:
    {{- /* No version: a label that changes would restart all pods. */}}
    {{- include "tasuki.selector" $root | nindent 4 }}
    tasuki.dev/component: {{ if .host }}worker-host{{ else }}worker{{ end }}
    tasuki.dev/pool: {{ $name | quote }}
    tasuki.dev/role: {{ $pool.role }}
    {{- if $divided }}
    tasuki.dev/host: {{ .host | quote }}
    {{- end }}
    {{- with $pool.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $pool.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  # The worker drains by itself and tells its routers on their streams: no preStop is needed.
  terminationGracePeriodSeconds: {{ add $pool.drainS 10 }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with $pool.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- $selector := printf "%s\ntasuki.dev/pool: %q" (include "tasuki.selector" $root) $name }}
  {{- include "tasuki.podFields" (dict "root" $root "of" $pool "selector" $selector) | trim | nindent 2 }}
  {{- with include "tasuki.affinity" (dict "root" $root "pool" $pool) | fromYaml }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      {{- include "tasuki.image" (dict "root" $root "image" $image) | nindent 6 }}
      command: [tasuki, worker]
      args:
        - {{ printf "--model=%s" $root.Values.model.source | quote }}
        - {{ printf "--served-name=%s" $root.Values.model.name | quote }}
        - --name=$(POD_NAME)
        - --role={{ $pool.role }}
        - --host=$(POD_IP)
        - --port={{ $pool.port }}
        - --device={{ if $pool.gpus }}cuda{{ else }}cpu{{ end }}
        {{- $ranks := mul $pool.hosts (max 1 (int $pool.gpus)) }}
        {{- if gt $ranks 1 }}
        - --tp={{ $ranks }}
        {{- end }}
        {{- if $divided }}
        - --nodes={{ include "tasuki.nodes" . }}
        - --rank={{ .host }}
        {{- end }}
        - --drain-s={{ $pool.drainS }}
        {{- with include "tasuki.fleetArgs" $root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $pool.args }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        {{- include "tasuki.podEnv" $root | nindent 8 }}
        {{- include "tasuki.cacheEnv" $root | nindent 8 }}
        {{- if $divided }}
        - name: POD_INDEX
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
        - name: TASUKI_NODES_KEY
          valueFrom: {secretKeyRef: {name: {{ $pool.nodesKey.secretName | quote }}, key: {{ $pool.nodesKey.key | quote }}}}
        {{- end }}
        {{- with $pool.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if not .host }}
      ports:
        - {name: grpc, containerPort: {{ $pool.port }}}
      {{- end }}
      {{- $probe := dict "grpc" (dict "port" (int $pool.port)) }}
      {{- if $root.Values.fleet.secretName }}
      {{- $probe = dict "tcpSocket" (dict "port" "grpc") }}
      {{- end }}
      {{- if .host }}
      # It has no port of its own. It is ready while the worker serves, so a rollout goes on to
      # the next worker then; a host that fails ends with the worker, and starts again with it.
      readinessProbe:
        exec:
          command:
            - bash
            - -c
            - exec 3<>"/dev/tcp/{{ .full }}-$POD_INDEX.{{ .full }}-hosts/{{ $pool.port }}"
        periodSeconds: 5
        timeoutSeconds: 5
        successThreshold: 2
      {{- else }}
      # The port opens when the model is loaded. A worker that hangs ends by itself
      # (--step-timeout-s), so liveness is only for a process that does not run at all: it is
      # slow to judge, and it asks nothing of routers, peers or the network.
      startupProbe:
        {{- toYaml $probe | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ max 1 (div $pool.startupS 5) }}
      # Routers connect within a second after the port opens. A rollout, or an eviction, takes the
      # old worker once this one is ready, so it is not ready before that.
      readinessProbe:
        {{- toYaml $probe | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        successThreshold: 2
      livenessProbe:
        {{- toYaml $probe | nindent 8 }}
        periodSeconds: 20
        timeoutSeconds: 20
        failureThreshold: 6
      {{- end }}
      {{- $limits := deepCopy ($pool.resources.limits | default dict) }}
      {{- if $pool.gpus }}
      {{- $_ := set $limits $pool.gpuResource (toString $pool.gpus) }}
      {{- end }}
      {{- if $pool.rdma.resource }}
      {{- $_ := set $limits $pool.rdma.resource (toString $pool.rdma.count) }}
      {{- end }}
      {{- $resources := deepCopy $pool.resources }}
      {{- if $limits }}
      {{- $_ := set $resources "limits" $limits }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        {{- include "tasuki.securityContext" $pool | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        {{- include "tasuki.mounts" (dict "root" $root "of" $pool) | trim | nindent 8 }}
        - name: shm
          mountPath: /dev/shm
  volumes:
    {{- include "tasuki.volumes" (dict "root" $root "of" $pool) | trim | nindent 4 }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $pool.sharedMemory | quote }}}
{{- end -}}

{{- /* `--nodes` of a worker: its pods of all hosts, by the names that their Service gives. */ -}}
{{- define "tasuki.nodes" -}}
{{- $full := .full -}}
{{- $nodes := list (printf "%s-$(POD_INDEX).%s-hosts:7100" $full $full) -}}
{{- range $host := untilStep 1 (int .pool.hosts) 1 -}}
{{- $nodes = append $nodes (printf "%s-host%d-$(POD_INDEX).%s-hosts" $full $host $full) -}}
{{- end -}}
{{- join "," $nodes -}}
{{- end -}}

{{- /* A pool's `affinity`, with the term of `near` added to its preferred ones. Helm merges lists by
replacing them, so they are joined here. Arguments: root, and the values of the `pool`. */ -}}
{{- define "tasuki.affinity" -}}
{{- $affinity := deepCopy .pool.affinity -}}
{{- if .pool.near.topologyKey -}}
{{- $near := include "tasuki.near" (dict "root" .root "near" .pool.near) | fromYaml -}}
{{- $podAffinity := $affinity.podAffinity | default dict -}}
{{- $key := "preferredDuringSchedulingIgnoredDuringExecution" -}}
{{- $preferred := append (get $podAffinity $key | default list) $near -}}
{{- $_ := set $podAffinity $key $preferred -}}
{{- $_ := set $affinity "podAffinity" $podAffinity -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}

{{- define "tasuki.near" -}}
weight: {{ .near.weight }}
podAffinityTerm:
  topologyKey: {{ .near.topologyKey | quote }}
  labelSelector:
    matchLabels:
      {{- include "tasuki.selector" .root | nindent 6 }}
      tasuki.dev/component: worker
{{- end }}
